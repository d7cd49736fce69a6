"""Students that need fewer network calls: what a teacher's long step amounts to, and a model that learns to make it."""
