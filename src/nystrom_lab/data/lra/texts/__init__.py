"""Text and Retrieval, and a user's own labelled texts in their place."""
