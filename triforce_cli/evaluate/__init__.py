"""Tasks on long texts, by modes that change the answer, by other ways to read, and by endpoints."""
