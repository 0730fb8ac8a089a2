"""One final class per file. `torchstrat.registry` names them."""
