import gc
import sys

from toprope.training.driver.program import main

gc.freeze()  # loaded modules stay: the collector need not visit them between groups
sys.exit(main())
