"""The five tasks of the Long Range Arena."""
