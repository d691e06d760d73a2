import sys

from toprope.analysis.plots.run_plots import main

sys.exit(main())
