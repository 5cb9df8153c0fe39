"""Text and Retrieval, or a user's own labelled texts instead."""
