"""Commands of the papers; each is an entry point of the group nystrom.commands, see pyproject.toml."""
