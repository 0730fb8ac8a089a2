"""Under the transport: messages are pickled, sealed, answered and waited for; silence is noticed. No RPC is here."""
