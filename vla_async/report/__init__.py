"""What a run has left in its directory, read again: the HTML report, its findings, and what they are made from."""
