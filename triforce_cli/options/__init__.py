"""What the user asks for: declarations, settings, and the request they make."""
