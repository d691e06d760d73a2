import sys

from toprope.training.policy.loading import main

sys.exit(main())
