"""TODO-DOC models"""
