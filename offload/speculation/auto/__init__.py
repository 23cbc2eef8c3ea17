"""What chooses drafters and lengths by what they have cost and gained."""
