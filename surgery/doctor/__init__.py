"""`surgery doctor`: which kernel serves which operation here and why, and what that is worth."""
