"""The simulator: a whole cache under random requests, copies and faults, all of it decided by one seed."""
