"""The trajectory API component: scored groups in, training batches out."""
