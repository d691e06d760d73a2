import sys

from toprope.trackers.program import main

sys.exit(main())
