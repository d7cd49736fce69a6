"""Where numbers are kept and shown: drawing samples, keyed points, records, figures and pages."""
