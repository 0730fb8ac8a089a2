"""How processes talk: messages are pickled, sealed, answered and waited for; silence is noticed. `rpc` sends them."""
