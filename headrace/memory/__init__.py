"""TODO-DOC memory"""
