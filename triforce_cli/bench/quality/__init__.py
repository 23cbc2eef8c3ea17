"""`bench --quality`: how much the modes that change the answer change it."""
