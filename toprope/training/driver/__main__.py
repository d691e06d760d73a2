import sys

from toprope.extras import without_collector

with without_collector():
    from toprope.training.driver.program import main

sys.exit(main())
