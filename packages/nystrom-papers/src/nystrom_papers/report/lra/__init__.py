"""Tables and curves of the Long Range Arena."""
