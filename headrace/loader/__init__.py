"""TODO-DOC loader"""
