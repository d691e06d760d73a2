import sys

from toprope.training.driver.program import main

sys.exit(main())
