"""Bytes and seconds of a request, before anything is loaded."""
