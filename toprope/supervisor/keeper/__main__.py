import sys

from toprope.supervisor.keeper.program import main

sys.exit(main())
