"""TODO-DOC chat"""
