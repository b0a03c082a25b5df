"""The REST service. It comes in a later version; this one is embedded (``radixkv.open``) or run as a command."""
