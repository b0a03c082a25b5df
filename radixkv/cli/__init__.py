"""The ``radixkv`` command. Needs the [cli] extra (typer, rich)."""
