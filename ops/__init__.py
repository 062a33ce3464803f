"""How Stemroute is deployed, operated and looked at: the command line and what it starts."""
