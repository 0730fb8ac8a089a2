"""``python -m torchstrat.launch --ps 2 --workers 4 SCRIPT …``"""

import sys

from torchstrat.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="python -m torchstrat.launch"))
