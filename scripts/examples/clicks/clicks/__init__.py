"""Who clicks? A data set and a model of one's own, for ``torchstrat train``."""
