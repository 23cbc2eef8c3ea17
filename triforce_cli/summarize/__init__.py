"""Summaries of documents and answers about them, whole or part by part."""
