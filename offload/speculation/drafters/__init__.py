"""What proposes tokens: n-grams of the text, a draft model, trees of either."""
