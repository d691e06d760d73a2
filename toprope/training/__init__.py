"""The programs of a run's crew. The supervisor starts them by module name; nothing above imports them."""
