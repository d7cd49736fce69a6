"""All systems on one corpus, with one budget, under one protocol: the table that no paper has."""
