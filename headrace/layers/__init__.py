"""TODO-DOC layers"""
