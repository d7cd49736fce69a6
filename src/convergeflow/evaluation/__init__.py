"""Scorers, protocols, metrics, likelihood, records, frontiers and reports: samples in, numbers with errors out."""
