"""How much of the package the tests run (./scripts/coverage), and how much of it they watch (./scripts/mutants)."""
