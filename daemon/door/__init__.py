"""The process of the HTTP door, through which routers announce prompts before they send the requests."""
