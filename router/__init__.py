"""The gateway: scores every worker for every request and streams the answer back."""
