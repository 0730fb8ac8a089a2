"""``python -m torchstrat``: the command ``torchstrat`` of this very Python."""

import sys

from torchstrat.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
