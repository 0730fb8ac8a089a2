"""How processes talk: messages are pickled, sealed, answered and waited for; silence is noticed. `rpc` sends them.

`requests` are the messages, whatever sends them; `failure_detector` names who is gone, `auth` refuses what was not
sealed with the cluster's secret. Processes of one host leave out the network: `same_host`.

Imports from `core`, `distributed`, `parameter_server`, `parameter_server/membership` and
`parameter_server/same_host`.
"""
