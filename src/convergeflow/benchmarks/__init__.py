"""Speed and memory against one frozen plain transcription of the paper's model.

The code lives inside the package, not in a folder beside it, because `convergeflow bench` must work where only the
package is installed; the records of this project's own runs are in `benchmarks/records` of the repository.
"""
