"""`ts.Variable`: state that is neither parameter nor buffer, and what assigning to it means on several replicas."""
