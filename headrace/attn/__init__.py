"""TODO-DOC attn"""
