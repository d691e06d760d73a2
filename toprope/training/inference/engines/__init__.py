"""The engines besides the embedded one, and the choice between them; see `toprope.training.inference.engine`."""
