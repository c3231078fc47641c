"""`conch serve` that ends with the tuner: ``python -m conch_tools.tune.trial_process PARENT FLAG...``."""

from __future__ import annotations

import signal
import sys

from conch.cli import main
from conch.workers.host.fork_template import end_with_parent

if __name__ == "__main__":
    end_with_parent(signal.SIGTERM, int(sys.argv[1]))
    sys.exit(main(["serve", *sys.argv[2:]]))
