"""Oracle, two-view device and driver: the parts every behavioural test of the cache is made of."""
