"""TODO-DOC sampling"""
