"""One example of everything that can be added to convergeflow; docs/extending.md walks through them."""
