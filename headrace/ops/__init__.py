"""TODO-DOC ops"""
