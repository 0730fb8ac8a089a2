"""What ./scripts/chaos kills and how it judges what is left: the plan, the ledger, the coordinator's process."""
